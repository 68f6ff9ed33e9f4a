"""Tests of images: decoding, sources, preprocessing."""
