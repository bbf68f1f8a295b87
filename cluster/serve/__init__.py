"""Runs the pools, the routers and the autoscaler as Ray Serve applications.

deploying   applications (what Serve is given), deploy (start, update, drain), external_cluster
            (`baton up --address`), router_probe (a first completion)
scaling     scale (`baton scale`); the autoscaler uses ``replicas.ServeReplicas``
in replicas replicas (the classes that Serve runs), node_settings (what each node adds)
Ray itself  ray_runtime, ray_nodes, replica_kinds (names), ray_internals (all private API)
"""
