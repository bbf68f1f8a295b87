"""`baton plan`: how many workers a load needs, and which techniques pay."""
