"""The rows of panels, and the PromQL they ask."""
