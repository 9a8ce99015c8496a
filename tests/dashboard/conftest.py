"""The browser for tests of the page."""

from real_browser import browser, new_browser

__all__ = ["browser", "new_browser"]
