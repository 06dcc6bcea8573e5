"""Encoders made smaller: layers left out, distilled, vocabulary cut by a rule, each step with a manifest of hashes."""
