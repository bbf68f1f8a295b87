"""What the OpenAI API says: bodies in, responses out.

checks            values of single fields
parse             a body against its model: the first mistake, by its path
unsupported       what is refused by name
fields            what completions and chats have in common
completion_body   POST /v1/completions
chat_body         POST /v1/chat/completions
form              how a response is laid out, whatever it is: Head, Form
completion_form   text_completion objects
chat_form         chat.completion objects
logprobs          log-probabilities in both of OpenAI's shapes
openapi           GET /openapi.json, from all of these
"""
