"""Small models for demonstrations, recipes and tests. Imported through `make_model` and `fetch_model`; `model_recipe`
needs no torch."""
