"""How much to draft: acceptance, costs and the controller."""
