// The Claude Agent SDK for JavaScript: the loop of the Claude Code that is bundled with it, with a tool in its own process.
import { createSdkMcpServer, query, tool } from "@anthropic-ai/claude-agent-sdk";
import { z } from "zod";

const [command, ...args] = JSON.parse(process.env.LOOK_SERVER);
const look = tool("look", "Looks at a place and says what is there.", { at: z.number().int() }, async ({ at }) => ({
  content: [{ type: "text", text: `look-${10 * at}` }],
}));
const mcpServers = {
  own: createSdkMcpServer({ name: "own", version: "1.0.0", tools: [look] }),
  places: { type: "stdio", command, args },
};
const allowedTools = ["mcp__own__look", "mcp__places__peek"];
for await (const message of query({ prompt: process.argv[2], options: { model: "policy", mcpServers, allowedTools } })) {
  if (message.type === "result") console.log(message.result);
}
