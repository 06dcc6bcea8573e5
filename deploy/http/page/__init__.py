"""The page at `/`: type a text and labels, see scores and which words matched."""

from deploy.http.page.page import Page

__all__ = ["Page"]
