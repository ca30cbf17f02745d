"""Remote references: objects that stay on the worker that owns them, counted wherever they are used."""
