// The AI SDK by node: a line of JSON for each request, and one for its answer.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [prefix] = process.argv.slice(2);
const require = createRequire(`${prefix}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { streamText, jsonSchema, tool, Output } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const version = (name) => require(`${prefix}/node_modules/${name}/package.json`).version;
const own = "@ai-sdk/openai-compatible";

const message = ({ role, text, calls, answers }) => {
  if (role === "tool") {
    const output = { type: "text", value: text };
    return { role, content: [{ type: "tool-result", toolCallId: answers, toolName: "look", output }] };
  }
  if (!calls.length) return { role: role === "developer" ? "system" : role, content: text };
  const said = text ? [{ type: "text", text }] : [];
  const made = calls.map(([toolCallId, toolName, input]) => ({
    type: "tool-call", toolCallId, toolName, input: JSON.parse(input),
  }));
  return { role, content: [...said, ...made] };
};

const ask = async ({ url, model, turns, tool: offered, format }) => {
  const provider = createOpenAICompatible({
    name: "anabranch", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true,
  });
  const found = { text: "", thoughts: "", calls: [] };
  let failed;
  const { fullStream } = streamText({
    model: provider(model),
    messages: turns.map(message),
    maxRetries: 0,
    onError: () => {},
    ...(offered && { tools: { look: tool({ inputSchema: jsonSchema(offered) }) } }),
    ...(format && { output: Output.object({ schema: jsonSchema(format) }) }),
  });
  for await (const part of fullStream) {
    if (part.type === "text-delta") found.text += part.text;
    if (part.type === "reasoning-delta") found.thoughts += part.text;
    if (part.type === "tool-call")
      found.calls.push([part.toolCallId, part.toolName, JSON.stringify(part.input)]);
    if (part.type === "error") failed = part.error;
  }
  if (failed === undefined) return found;
  return failed.statusCode === 400 ? { refused: failed.responseBody } : { failed: String(failed) };
};

console.warn = () => {};
globalThis.AI_SDK_LOG_WARNINGS = false;
console.log(JSON.stringify({ name: `AI SDK ${version("ai")}, ${own} ${version(own)}` }));
for await (const line of createInterface({ input: process.stdin })) {
  const said = await ask(JSON.parse(line)).catch((error) => ({ failed: String(error) }));
  console.log(JSON.stringify(said));
}
