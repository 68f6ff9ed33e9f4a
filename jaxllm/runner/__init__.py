"""Compiled programs and their inputs."""
