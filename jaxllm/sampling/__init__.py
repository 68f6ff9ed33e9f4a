"""Sampling in compiled code: penalties, masks, filters and the draw, on one device or several."""
