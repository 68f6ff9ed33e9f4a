// Anthropic's package against a server of ours: node anthropic.mjs FEATURE URL MODEL QUESTION. Prints what came as JSON.
import Anthropic from "@anthropic-ai/sdk";
import { toolRunners, TOOLS } from "./asked.mjs";

const [feature, baseURL, model, question] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, max_tokens: 100, temperature: 0, messages: [{ role: "user", content: question }] };
const textOf = ({ content }) => content.map((block) => block.text ?? "").join("");

const features = {
  messages: async () => {
    const whole = await client.messages.create(asked);
    let streamed = "";
    const stream = client.messages.stream(asked).on("text", (text) => (streamed += text));
    const final = await stream.finalMessage();
    const { input_tokens: counted } = await client.messages.countTokens({ model, messages: asked.messages });
    return { whole: textOf(whole), streamed, final: textOf(final), counted, used: whole.usage.input_tokens };
  },
  tools: async () => {
    const tools = TOOLS.map(({ function: { name, description, parameters } }) => ({
      name,
      description,
      input_schema: parameters,
    }));
    const called = await client.messages.create({ ...asked, tools });
    const made = called.content.filter((block) => block.type === "tool_use");
    const results = made.map(({ id, name, input }) => ({
      type: "tool_result",
      tool_use_id: id,
      content: String(toolRunners[name](input)),
    }));
    const more = [{ role: "assistant", content: called.content }, { role: "user", content: results }];
    const answer = await client.messages.stream({ ...asked, tools, messages: [...asked.messages, ...more] }).finalMessage();
    return { calls: made.map((call) => [call.name, call.input]), answer: textOf(answer) };
  },
};

console.log(JSON.stringify(await features[feature]()));
