"""The launcher: settings, the Ray Serve application, the supervisor and the command line."""
