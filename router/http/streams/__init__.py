"""How the events of one streamed response reach its client, and how its choices are joined."""
