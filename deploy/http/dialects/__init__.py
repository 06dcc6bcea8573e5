"""Interfaces that other programs already speak, each a translation to and from the native classify request."""
