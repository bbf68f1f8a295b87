"""The demo models that come with the package."""
