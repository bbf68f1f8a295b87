"""Chat: messages to a prompt, formats and tools to a grammar, text to tool calls.

Made once for a model:

    tokenizer = load_tokenizer(model_path)
    template  = load_template(model_path, tokenizer)      template.py: None where it has none
    planner   = Planner(Vocabulary.of(tokenizer), detect(template.source if template else ""))
    checker   = GrammarChecker(path of tokenizer.json)    check.py; close() at the end

For each request (``Messages``, ``Tools``, ``ToolChoice``, ``ResponseFormat``, ``StructuredOutputs``
are pydantic types for fields of a body; parts of an error's place that begin with ``TAG`` are no
fields):

    plan = planner.plan(ToolWish(tools, choice, parallel), response_format, structured)
    plan = await checker.check(plan, tenant)              400 for a grammar that cannot be built
    ids = await template.prompt(body.messages, plan.tools)
    Sampling(grammar=plan.grammar, ...)                   "": anything
    parser = plan.new_parser()                            None: the text is the content
    for each piece of text: parser.push(text) -> [Content | CallStart | CallArguments]
    at the end: parser.flush(), then plan.finish_reason(reason, called=parser.called)

With ``plan.show_special`` the detokenizer must not skip special tokens, because the marks around a
call are some; the grammar keeps all others out of the text (the token that ends it never shows).

Every mistake of a client is an ``ApiError`` with status 400 and the field as ``param``.
"""
