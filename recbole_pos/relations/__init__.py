"""Attributes as explicit relations between interactions (AttrFormer).

Relations are numbers made from attributes only. Nothing here knows a model or has a parameter.
"""
