"""Request bodies of the OpenAI API: pydantic models and their checks."""
