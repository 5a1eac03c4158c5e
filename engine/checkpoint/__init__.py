"""Weights in and out of a model that lies over many ranks."""

from engine.checkpoint.full_state import full_state_dict, load_full_state_dict
from engine.checkpoint.safetensors_load import load_safetensors
from engine.checkpoint.safetensors_save import save_safetensors

__all__ = ["full_state_dict", "load_full_state_dict", "load_safetensors", "save_safetensors"]
