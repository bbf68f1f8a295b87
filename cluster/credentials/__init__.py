"""Creates certificates, API keys, and the folder that all nodes of a cluster share."""
