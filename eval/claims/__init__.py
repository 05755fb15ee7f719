"""A board of claims: what papers say, and what runs that anyone can repeat say of it."""
