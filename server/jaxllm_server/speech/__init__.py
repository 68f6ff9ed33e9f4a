"""Transcriptions of recordings."""
