from cluster.local.start_snippets import baton_command, curl_command, python_snippet


def test_example_commands_are_quoted() -> None:
    assert "it'\\''s" in curl_command("http://u", "it's")
    compile(python_snippet("http://u", "it's"), "snippet", "exec")
    assert baton_command("status", "default").endswith("baton status")
    assert baton_command("down", "other").endswith("baton down --cluster other")


def test_example_commands_use_the_api_key() -> None:
    assert '"Authorization: Bearer $OPENAI_API_KEY"' in curl_command("http://u", "m", keys=True)
    assert "OPENAI_API_KEY" not in curl_command("http://u", "m")
    snippet = python_snippet("http://u", "m", keys=True)
    compile(snippet, "snippet", "exec")
    assert snippet.startswith("import os\n") and 'os.environ["OPENAI_API_KEY"]' in snippet


def test_example_commands_trust_the_ca() -> None:
    ca = "/my folder/ca.pem"
    assert curl_command("https://u", "m", ca=ca).startswith(f"curl -N --cacert '{ca}' https://u")
    for keys in (False, True):
        snippet = python_snippet("https://u", "m", keys=keys, ca=ca)
        compile(snippet, "snippet", "exec")
        assert f"ssl.create_default_context(cafile='{ca}')" in snippet
        assert "http_client=DefaultHttpxClient(verify=trust)" in snippet
    assert "cacert" not in curl_command("http://u", "m")
