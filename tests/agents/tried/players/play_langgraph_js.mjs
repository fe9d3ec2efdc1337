// LangChain's agent for JavaScript, on LangGraph.
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent } from "langchain";
import { z } from "zod";

const look = tool(({ at }) => `look-${10 * at}`, {
  name: "look",
  description: "Looks at a place and says what is there.",
  schema: z.object({ at: z.number().int() }),
});
const model = new ChatOpenAI({ model: "policy", configuration: { baseURL: process.env.OPENAI_BASE_URL } });
const agent = createAgent({ model, tools: [look] });
const result = await agent.invoke({ messages: [{ role: "user", content: process.argv[2] }] });
console.log(result.messages.at(-1).content);
