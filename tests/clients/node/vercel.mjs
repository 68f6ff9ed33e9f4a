// Vercel's AI SDK against a server of ours: node vercel.mjs URL MODEL MODE. Prints the object as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, tool } from "ai";
import { z } from "zod";

const [baseURL, name, mode] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "jaxllm", baseURL, supportsStructuredOutputs: true })(name);
const schema = z.object({ name: z.enum(["Ada", "Grace"]), age: z.int().min(0).max(99) });
const prompt = "Ada is 36 years old.";

async function ask() {
  if (mode === "object") return (await generateObject({ model, schema, prompt, maxRetries: 0 })).object;
  if (mode === "stream") {
    const { object, partialObjectStream } = streamObject({ model, schema, prompt, maxRetries: 0 });
    for await (const partial of partialObjectStream);
    return await object;
  }
  const person = tool({ description: "Somebody", inputSchema: schema });
  const answer = await generateText({ model, tools: { person }, toolChoice: "required", prompt, maxRetries: 0 });
  return answer.toolCalls[0].input;
}

console.log(JSON.stringify(await ask()));
