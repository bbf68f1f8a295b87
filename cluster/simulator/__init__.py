"""`baton simulate`: a load on a simulated cluster, through the product's own decisions."""
