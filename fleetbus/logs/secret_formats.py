"""Formats of credentials that can be distinguished from other text, for logs and recordings: one list for both. Pure.

Names and prefixes follow the default rules of gitleaks (github.com/gitleaks/gitleaks, config/gitleaks.toml, read at commit
009e025), which its maintainers keep; the expressions are our own and wider, for a token that is cut or longer is still one. To
bring the list up to date, compare its rules that begin with a fixed prefix; every line here has its example in the tests.
Policies write what is searched, so no expression may scan a text again from each of its places: what repeats is bounded.
"""

import re

REDACTED = "[redacted]"

FORMATS = {
    "nats-nkey-seed": r"\bS[A-Z2-7]{57}\b",
    "openai, anthropic, openrouter": r"\bsk-[A-Za-z0-9_-]{16,}",
    "github-pat, -oauth, -app, -refresh": r"\bgh[pousr]_[A-Za-z0-9]{20,}",
    "github-fine-grained-pat": r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    "gitlab": r"\b(?:gl(?:pat|ptt|rt|cbt|dt|soat|oas|ft|imt|agent|ffct)|GR1348941|glrtr)-?[A-Za-z0-9_=.-]{20,}",
    "gcp-api-key": r"\bAIza[A-Za-z0-9_-]{35}",
    "google-oauth": r"\b(?:ya29\.|1//0)[A-Za-z0-9_.-]{20,}",
    "google-oauth-client": r"\bGOCSPX-[A-Za-z0-9_-]{20,}",
    "npm-access-token": r"\bnpm_[A-Za-z0-9]{30,}",
    "pypi-upload-token": r"\bpypi-[A-Za-z0-9_-]{16,}",
    "huggingface": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}",
    "aws-access-token": r"\b(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b",
    "slack": r"\bxox[abeoprs](?:\.xox[bp])?-[A-Za-z0-9-]{10,}",
    "slack-app-token": r"\bxapp-[A-Za-z0-9-]{10,}",
    "slack-webhook": r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{20,}",
    "stripe": r"\b(?:sk|rk|whsec)_(?:test_|live_|prod_)?[A-Za-z0-9]{16,}",
    "sendgrid": r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    "twilio": r"\bSK[0-9a-f]{32}\b",
    "digitalocean": r"\bdo[opr]_v1_[a-f0-9]{40,}",
    "databricks": r"\bdapi[a-f0-9]{32}",
    "docker": r"\bdck(?:r_pat|r_oat)_[A-Za-z0-9_-]{20,}",
    "hashicorp-vault": r"\bhv[sbr]\.[A-Za-z0-9_-]{20,}",
    "hashicorp-terraform": r"\b[A-Za-z0-9]{14}\.atlasv1\.[A-Za-z0-9_=-]{40,}",
    "pulumi": r"\bpul-[a-f0-9]{40}",
    "planetscale": r"\bpscale_(?:tkn|pw|oauth)_[A-Za-z0-9_.=-]{20,}",
    "linear": r"\blin_api_[A-Za-z0-9]{30,}",
    "notion": r"\bntn_[A-Za-z0-9]{30,}",
    "grafana": r"\bgl(?:c|sa)_[A-Za-z0-9+/_=-]{20,}",
    "new-relic": r"\bNR(?:AK|II|JS)-[A-Za-z0-9-]{16,}",
    "sentry": r"\bsntr[yus]+_[A-Za-z0-9+/_=-]{20,}",
    "shopify": r"\bshp(?:at|ca|pa|ss)_[a-fA-F0-9]{20,}",
    "groq, xai, perplexity, nvidia, replicate, fireworks": r"\b(?:gsk_|xai-|pplx-|nvapi-|r8_|fw_)[A-Za-z0-9_-]{20,}",
    "age-secret-key": r"\bAGE-SECRET-KEY-1[A-Z0-9]{40,}",
    "1password": r"\bops_eyJ[A-Za-z0-9+/=]{20,}",
    "telegram-bot-api-token": r"\b[0-9]{8,12}:AA[A-Za-z0-9_-]{32,}",
    "jwt": r"\beyJ[A-Za-z0-9_-]{8,1024}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    "private-key": r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
}
"""Expression by the name of what it finds."""

FORMAT = re.compile("|".join(FORMATS.values()))
_AUTHORIZATION = re.compile(
    r"(?i)(\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:[a-z][a-z0-9-]{1,20}\s+)?)([A-Za-z0-9._~+/=:-]{4,})"
    r"|(\b(?:bearer|basic)\s+)([A-Za-z0-9._~+/=-]{8,})"
)

_VARIABLE = re.compile(r"(?<![\w?&])([A-Z_][A-Z0-9_]*=)(\"[^\"]*\"|'[^']*'|[^\s\"']+)")
_FLAG = re.compile(
    r"(?i)((?<![\w-])--?[\w-]{0,64}(?:key|token|secret|passw\w{0,64}|credential\w{0,64}|auth\w{0,64})(?:=|\s+))(\"[^\"]*\"|'[^']*'|[^\s\"'-][^\s\"']*)"
)


def redact_command(text: str) -> str:
    """A command line without the values that it sets variables to, and without those of flags that name a secret."""
    return _FLAG.sub(rf"\1{REDACTED}", _VARIABLE.sub(rf"\1{REDACTED}", text))


def redact_formats(text: str) -> str:
    """The text without credentials of known formats, and without what follows Authorization, Bearer or Basic."""
    return _AUTHORIZATION.sub(_keep_scheme, FORMAT.sub(REDACTED, text))


def _keep_scheme(found: re.Match[str]) -> str:
    value = found.group(2) or found.group(4)
    if found.group(4) and value.isalpha() and value.islower():
        return found.group()  # prose: "basic arithmetic", "bearer instruments"
    return (found.group(1) or found.group(3)) + REDACTED
