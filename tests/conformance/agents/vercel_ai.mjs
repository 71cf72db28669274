// The Vercel AI SDK with its default OpenAI provider (Responses API): tool loops, whole and streamed.
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const tools = {
  get_weather: tool({
    description: "Weather of a city",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `${city}: 20 degrees`,
  }),
};
const call = { model: openai("puppet"), tools, prompt: "Weather in Paris?", stopWhen: stepCountIs(4) };

const whole = await generateText(call);
if (!whole.steps.some((step) => step.toolResults.length === 1)) throw new Error("no tool result");
const stream = streamText(call);
let text = "";
for await (const piece of stream.textStream) text += piece;
if (text !== whole.text) throw new Error(`streamed ${JSON.stringify(text)}, whole ${JSON.stringify(whole.text)}`);
const chat = await generateText({ ...call, model: openai.chat("puppet") });
if (chat.text !== whole.text) throw new Error(`chat completions: ${chat.text}`);
console.log(whole.text);
