"""Small models for demonstrations and tests. Imported through `make_model`; `model_recipe` needs no torch."""
