"""How processes open and dial their gRPC ports, and serve their metrics."""
