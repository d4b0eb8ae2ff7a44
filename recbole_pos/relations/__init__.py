"""Attributes as explicit relations between events (AttrFormer): declared, precomputed, looked up.

Relations are numbers made from attributes only. Nothing here knows a model or has a parameter.
"""
