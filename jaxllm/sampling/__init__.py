"""From logits to a token, in compiled code: penalties, masks, filters, the draw, on one device or several.

Knows rows of numbers. Knows no request and no scheduler.
"""
