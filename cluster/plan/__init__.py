"""`baton plan`: what would pay, before it is bought."""
