"""Records of live processes in Redis: directory, leases, utilisation of workers."""
