"""The pair's chat template: a conversation as a Python file, where others speak in comments.

The models know Python and nothing of chats, so an answer is the code that may follow. Tool calls
are written as Hermes has them; only a grammar makes these models write one.
"""

CHAT_TEMPLATE = """\
{{ bos_token }}
{%- if tools %}
    {{- '# Tools, called as <tool_call>{"name": ..., "arguments": ...}</tool_call>:\\n' }}
    {%- for tool in tools %}
        {{- '# ' ~ tool | tojson ~ '\\n' }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '\\n' ~ message.content ~ '\\n\\n' if message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' ~ call.function | tojson ~ '\\n</tool_call>\\n' }}
        {%- endfor %}
    {%- else %}
        {{- '# ' ~ message.role ~ ': ' ~ message.content | replace('\\n', '\\n# ') ~ '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '\\n' }}
{%- endif %}
"""
