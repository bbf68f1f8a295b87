"""Ends of the product: the real fronts, without engines or with engines that have no model."""
