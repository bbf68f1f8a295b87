"""Responses of the OpenAI API: JSON objects, stream chunks, and the OpenAPI document."""
