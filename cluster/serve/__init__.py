"""Ray Serve: applications, deployment, scaling, nodes."""
