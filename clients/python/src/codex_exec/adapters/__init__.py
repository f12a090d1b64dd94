"""codex-exec inside other frameworks: each module needs the extra of its name.

`swe_rex` (SWE-ReX), `openai_agents` (OpenAI Agents SDK), `langchain` (LangChain Deep Agents), `jupyter` (IPython).
"""
