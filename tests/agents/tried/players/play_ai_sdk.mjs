// The AI SDK's ToolLoopAgent: its own loop over each vendor's protocol, streamed, with a server of the Model Context Protocol.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createGoogleGenerativeAI } from "@ai-sdk/google";
import { createMCPClient } from "@ai-sdk/mcp";
import { Experimental_StdioMCPTransport } from "@ai-sdk/mcp/mcp-stdio";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { ToolLoopAgent, tool } from "ai";
import { z } from "zod";

const [prompt, way] = process.argv.slice(2);
const env = process.env;
const models = {
  openai: () => createOpenAI({ baseURL: env.OPENAI_BASE_URL, apiKey: env.OPENAI_API_KEY })("policy"),
  compatible: () =>
    createOpenAICompatible({ name: "fleet", baseURL: env.OPENAI_BASE_URL, apiKey: env.OPENAI_API_KEY })("policy"),
  anthropic: () => createAnthropic({ baseURL: `${env.ANTHROPIC_BASE_URL}/v1`, apiKey: env.ANTHROPIC_API_KEY })("policy"),
  google: () =>
    createGoogleGenerativeAI({ baseURL: `${env.GOOGLE_GEMINI_BASE_URL}/v1beta`, apiKey: env.GEMINI_API_KEY })("policy"),
};
const [command, ...args] = JSON.parse(env.LOOK_SERVER);
const served = await createMCPClient({ transport: new Experimental_StdioMCPTransport({ command, args }) });
const look = tool({
  description: "Looks at a place and says what is there.",
  inputSchema: z.object({ at: z.number().int() }),
  execute: ({ at }) => `look-${10 * at}`,
});
const agent = new ToolLoopAgent({ model: models[way](), tools: { look, ...(await served.tools()) } });
const result = await agent.stream({ prompt });
for await (const part of result.textStream) process.stdout.write(part);
await served.close();
