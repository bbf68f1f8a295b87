"""How the demo models and their heads are trained, evaluated and exported."""
