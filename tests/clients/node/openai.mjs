// OpenAI's package against a server of ours: node openai.mjs FEATURE URL MODEL. Prints what came as JSON.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { Person, toolRunners, TOOLS } from "./asked.mjs";

const [feature, baseURL, model, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, messages: [{ role: "user", content: question }], temperature: 0 };
const functions = TOOLS.map(({ function: own }) => ({ type: "function", strict: false, ...own }));

async function pieces(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}

const features = {
  chat: async () => (await client.chat.completions.create(asked)).choices[0].message.content,
  stream: async () => pieces(await client.chat.completions.create({ ...asked, stream: true })),
  structured: async () => {
    const format = zodResponseFormat(Person, "person");
    return (await client.chat.completions.parse({ ...asked, response_format: format })).choices[0].message.parsed;
  },
  tools: async () => {
    const calls = [];
    const tools = TOOLS.map((tool) => ({
      type: "function",
      function: {
        ...tool.function,
        parse: JSON.parse,
        function: (given) => {
          calls.push([tool.function.name, given]);
          return String(toolRunners[tool.function.name](given));
        },
      },
    }));
    const answer = await client.chat.completions.runTools({ ...asked, tools }).finalContent();
    return { calls, answer };
  },
  logprobs: async () =>
    (await client.chat.completions.create({ ...asked, logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content,
  embeddings: async () =>
    (await client.embeddings.create({ model, input: JSON.parse(question) })).data.map((item) => item.embedding),
  responses: async () => {
    const own = { model, input: question, temperature: 0 };
    const whole = (await client.responses.create(own)).output_text;
    const stream = client.responses.stream(own);
    let streamed = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") streamed += event.delta;
    const final = (await stream.finalResponse()).output_text;
    const format = zodTextFormat(Person, "person");
    const { output_parsed: parsed } = await client.responses.parse({ ...own, text: { format } });
    return { whole, streamed, final, parsed };
  },
  "responses-tools": async () => {
    const own = { model, tools: functions, temperature: 0 };
    const called = await client.responses.create({ ...own, input: question });
    const made = called.output.filter((item) => item.type === "function_call");
    const input = made.map(({ call_id, name, arguments: given }) => ({
      type: "function_call_output",
      call_id,
      output: String(toolRunners[name](JSON.parse(given))),
    }));
    const answer = await client.responses.create({ ...own, input, previous_response_id: called.id });
    return { calls: made.map((call) => [call.name, JSON.parse(call.arguments)]), answer: answer.output_text };
  },
};

console.log(JSON.stringify(await features[feature]()));
