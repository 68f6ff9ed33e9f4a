"""Transcription: the decoding rules of speech models such as Whisper, and long recordings."""
