"""Pictures of a snapshot: text, a still for notebooks, a page to look around in. They take data, never a driver."""
