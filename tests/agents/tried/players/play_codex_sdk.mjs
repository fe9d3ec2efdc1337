// The Codex SDK: the loop of the Codex that is bundled with it.
import { Codex } from "@openai/codex-sdk";

const provider = { name: "policy", base_url: process.env.OPENAI_BASE_URL, env_key: "OPENAI_API_KEY", wire_api: "responses" };
const [command, ...args] = JSON.parse(process.env.LOOK_SERVER);
const codex = new Codex({
  config: {
    model_provider: "policy",
    model_providers: { policy: provider },
    mcp_servers: { places: { command, args } },
    mcp_optional_startup_grace_ms: 60000,
  },
});
const thread = codex.startThread({ model: "policy", skipGitRepoCheck: true, sandboxMode: "danger-full-access" });
console.log((await thread.run(process.argv[2])).finalResponse);
