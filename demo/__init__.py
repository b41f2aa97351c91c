"""The demonstration model that ships with moemesh, and the recipe that made it."""
