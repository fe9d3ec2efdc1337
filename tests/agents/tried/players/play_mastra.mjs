// Mastra's Agent: its own loop over an address that speaks OpenAI's chat completions.
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { MCPClient } from "@mastra/mcp";
import { z } from "zod";

const [command, ...args] = JSON.parse(process.env.LOOK_SERVER);
const served = new MCPClient({ servers: { places: { command, args } } });
const look = createTool({
  id: "look",
  description: "Looks at a place and says what is there.",
  inputSchema: z.object({ at: z.number().int() }),
  execute: async (input) => `look-${10 * (input.context ?? input).at}`,
});
const agent = new Agent({
  id: "looker",
  name: "looker",
  instructions: "Be brief.",
  model: { id: "fleet/policy", url: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY },
  tools: { look, ...(await served.listTools()) },
});
console.log((await agent.generate(process.argv[2])).text);
await served.disconnect();
