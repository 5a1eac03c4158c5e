"""Weights in and out of a model that lies over many ranks."""

from engine.checkpoint.full_state import full_state_dict, load_full_state_dict

__all__ = ["full_state_dict", "load_full_state_dict"]
