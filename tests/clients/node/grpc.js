// Calls a jaxllm server from Node: node client.js HOST:PORT PROMPT. Prints what it got as one JSON object.
const path = require("path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [target, prompt] = process.argv.slice(2);
const proto = path.join(__dirname, "..", "..", "..", "proto");
const definition = loader.loadSync("jaxllm/v1/inference.proto", { includeDirs: [proto], longs: Number, enums: String });
const { jaxllm } = grpc.loadPackageDefinition(definition);
// Pings of an idle channel, which servers with a wrong keepalive key answer with "too many pings".
const client = new jaxllm.v1.InferenceService(target, grpc.credentials.createInsecure(), {
  "grpc.keepalive_time_ms": 1000,
  "grpc.keepalive_permit_without_calls": 1,
});
const request = { text: prompt, sampling: { temperature: 0.9, seed: 5 }, stop: { maxTokens: 24 } };

const unary = (message) =>
  new Promise((resolve, reject) => client.generate(message, (error, answer) => (error ? reject(error) : resolve(answer))));

const stream = () =>
  new Promise((resolve, reject) => {
    let text = "";
    client
      .streamGenerate(request)
      .on("data", (message) => message.deltas.forEach((delta) => (text += delta.text)))
      .on("error", reject)
      .on("end", () => resolve(text));
  });

const cancelled = () =>
  new Promise((resolve) => {
    const call = client.streamGenerate({ ...request, stop: { maxTokens: 400, ignoreEos: true } });
    call.on("data", () => call.cancel()).on("error", (error) => resolve(error.code));
  });

async function main() {
  const told = {
    unary: (await unary(request)).outputs[0].text,
    stream: await stream(),
    error: await unary({ ...request, sampling: { topP: 7 } }).catch((error) => error.code),
    cancelled: await cancelled(),
  };
  console.log(JSON.stringify(told));
  client.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
