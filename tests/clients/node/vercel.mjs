// Vercel's AI SDK against a server of ours: node vercel.mjs FEATURE URL MODEL QUESTION. Prints what came as JSON.
// Its provider "compatible" asks for chat completions, "openai" for Responses, "anthropic" for Messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import { Person, toolRunners, TOOLS } from "./asked.mjs";

const [feature, baseURL, name, question] = process.argv.slice(2);
const [what, provider = "compatible"] = feature.split("-");
const compatible = createOpenAICompatible({ name: "jaxllm", baseURL, supportsStructuredOutputs: true });
const model = {
  compatible: () => compatible(name),
  openai: () => createOpenAI({ baseURL, apiKey: "none" })(name),
  anthropic: () => createAnthropic({ baseURL, apiKey: "none" })(name),
}[provider]();
const asked = { model, prompt: question, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };

const features = {
  chat: async () => (await generateText(asked)).text,
  stream: async () => {
    let text = "";
    for await (const piece of streamText(asked).textStream) text += piece;
    return text;
  },
  structured: async () => {
    const { object, partialObjectStream } = streamObject({ ...asked, schema: Person });
    for await (const partial of partialObjectStream);
    return [(await generateObject({ ...asked, schema: Person })).object, await object];
  },
  forced: async () => {
    const person = tool({ description: "Somebody", inputSchema: Person });
    return (await generateText({ ...asked, tools: { person }, toolChoice: "required" })).toolCalls[0].input;
  },
  tools: async () => {
    const tools = Object.fromEntries(
      TOOLS.map(({ function: own }) => [
        own.name,
        tool({
          description: own.description,
          inputSchema: jsonSchema(own.parameters),
          execute: async (given) => String(toolRunners[own.name](given)),
        }),
      ]),
    );
    const { steps, text } = await generateText({ ...asked, tools, stopWhen: stepCountIs(3) });
    const calls = steps.flatMap((step) => step.toolCalls).map((call) => [call.toolName, call.input]);
    return { calls, answer: text };
  },
  embeddings: async () =>
    (await embedMany({ model: compatible.textEmbeddingModel(name), values: JSON.parse(question) })).embeddings,
};

console.log(JSON.stringify(await features[what]()));
