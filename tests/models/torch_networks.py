"""Networks of PyTorch for tests: torchvision's ResNet by its names, a vision transformer, an encoder, an LSTM."""

import torch
import torch.nn.functional as F
from torch import nn


class Cnn(nn.Module):
  """A convolution with BatchNorm and a dense layer."""

  def __init__(self, dropout=0.0):
    super().__init__()
    self.conv = nn.Conv2d(3, 6, 3, padding=1)
    self.norm = nn.BatchNorm2d(6)
    self.drop = nn.Dropout(dropout)
    self.fc = nn.Linear(6 * 4 * 4, 5)

  def forward(self, x):
    x = F.max_pool2d(F.relu(self.norm(self.conv(x)), inplace=True), 2)
    return self.fc(self.drop(torch.flatten(x, 1)))


class Block(nn.Module):
  """torchvision's BasicBlock."""

  def __init__(self, inputs, outputs, stride):
    super().__init__()
    self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    self.bn1 = nn.BatchNorm2d(outputs)
    self.relu = nn.ReLU(inplace=True)
    self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
    self.bn2 = nn.BatchNorm2d(outputs)
    self.downsample = None
    if stride > 1 or inputs != outputs:
      self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

  def forward(self, x):
    kept = x if self.downsample is None else self.downsample(x)
    out = self.relu(self.bn1(self.conv1(x)))
    out = self.bn2(self.conv2(out))
    out += kept
    return self.relu(out)


class ResNet18(nn.Module):
  """torchvision's ResNet-18, of any width, with its stem for large images."""

  def __init__(self, classes=10, width=64):
    super().__init__()
    self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
    self.bn1 = nn.BatchNorm2d(width)
    self.relu = nn.ReLU(inplace=True)
    self.maxpool = nn.MaxPool2d(3, 2, 1)
    sizes = [width, width, 2 * width, 4 * width, 8 * width]
    for number in range(1, 5):
      inputs, outputs = sizes[number - 1], sizes[number]
      blocks = Block(inputs, outputs, 1 if number == 1 else 2), Block(outputs, outputs, 1)
      setattr(self, f'layer{number}', nn.Sequential(*blocks))
    self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
    self.fc = nn.Linear(8 * width, classes)

  def forward(self, x):
    x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
    x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
    return self.fc(torch.flatten(self.avgpool(x), 1))


class Attention(nn.Module):
  """timm's attention."""

  def __init__(self, width, heads):
    super().__init__()
    self.heads = heads
    self.qkv = nn.Linear(width, 3 * width)
    self.proj = nn.Linear(width, width)

  def forward(self, x):
    count, length, width = x.shape
    qkv = self.qkv(x).reshape(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(count, length, width))


class VitBlock(nn.Module):
  def __init__(self, width, heads):
    super().__init__()
    self.norm1 = nn.LayerNorm(width, eps=1e-6)
    self.attn = Attention(width, heads)
    self.norm2 = nn.LayerNorm(width, eps=1e-6)
    self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

  def forward(self, x):
    x = x + self.attn(self.norm1(x))
    return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
  """A vision transformer by timm's names."""

  def __init__(self, side=8, patch=4, width=16, heads=4, depth=2, classes=5):
    super().__init__()
    self.patch_embed = nn.ModuleDict({'proj': nn.Conv2d(3, width, patch, patch)})
    self.cls_token = nn.Parameter(torch.randn(1, 1, width))
    self.pos_embed = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width))
    self.blocks = nn.Sequential(*(VitBlock(width, heads) for _ in range(depth)))
    self.norm = nn.LayerNorm(width, eps=1e-6)
    self.head = nn.Linear(width, classes)

  def forward(self, x):
    x = self.patch_embed['proj'](x).flatten(2).transpose(1, 2)
    x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
    return self.head(self.norm(self.blocks(x))[:, 0])


class Encoder(nn.Module):
  """A BERT-like encoder of token ids: embeddings, `torch.nn`'s layers, a head that is tied to nothing."""

  def __init__(self, vocabulary=30, length=7, width=16, classes=5):
    super().__init__()
    self.words = nn.Embedding(vocabulary, width, padding_idx=0)
    self.places = nn.Embedding(length, width)
    self.register_buffer('position_ids', torch.arange(length)[None])
    layer = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, activation='gelu', batch_first=True)
    self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    self.pooler = nn.Linear(width, width)
    self.head = nn.Linear(width, classes)

  def forward(self, tokens):
    x = self.words(tokens) + self.places(self.position_ids)
    return self.head(torch.tanh(self.pooler(self.layers(x)[:, 0])))


class Decoder(nn.Module):
  """A GPT-like decoder of token ids, whose mask of attention is a buffer with infinities."""

  def __init__(self, vocabulary=30, length=7, width=16):
    super().__init__()
    self.words = nn.Embedding(vocabulary, width)
    self.places = nn.Parameter(torch.randn(length, width))
    self.block = nn.TransformerEncoderLayer(
      width, 2, 4 * width, dropout=0.0, activation='gelu', batch_first=True, norm_first=True
    )
    self.norm = nn.LayerNorm(width)
    self.head = nn.Linear(width, vocabulary)
    self.register_buffer('mask', nn.Transformer.generate_square_subsequent_mask(length))

  def forward(self, tokens):
    return self.head(self.norm(self.block(self.words(tokens) + self.places, src_mask=self.mask)))


class Pooled(nn.Module):
  """A recurrent network of token ids, times first, whose mean leaves out padding."""

  def __init__(self, vocabulary=30, width=8, classes=5):
    super().__init__()
    self.words = nn.Embedding(vocabulary, width, padding_idx=0)
    self.lstm = nn.LSTM(width, width)
    self.head = nn.Linear(width, classes)

  def forward(self, tokens):
    held = (tokens != 0).float().t()[..., None]
    x, _ = self.lstm(self.words(tokens.t()))
    return self.head((x * held).sum(0) / held.sum(0).clamp(min=1))


class LastToken(nn.Module):
  """What stands at the token with the largest id, as CLIP reads texts."""

  def __init__(self, vocabulary=30, length=7, width=8, classes=5):
    super().__init__()
    self.words = nn.Embedding(vocabulary, width)
    self.hidden = nn.Linear(width, width)
    self.head = nn.Linear(width, classes)

  def forward(self, tokens):
    x = torch.tanh(self.hidden(self.words(tokens.long().flip(1).unsqueeze(0)).squeeze(0)))
    return self.head(x[torch.arange(len(x)), tokens.flip(1).argmax(-1)])


class Numbered(nn.Module):
  """A network that computes with its token ids as numbers."""

  def __init__(self, vocabulary=30, width=8, classes=5):
    super().__init__()
    self.words = nn.Embedding(vocabulary, width)
    self.head = nn.Linear(width, classes)

  def forward(self, tokens):
    return self.head((self.words(tokens) * tokens[..., None] / 30).mean(1))


class Rounded(nn.Module):
  """A network of floats that looks up their whole part."""

  def __init__(self, rows=30, width=8, classes=5):
    super().__init__()
    self.rows = nn.Embedding(rows, width)
    self.head = nn.Linear(width, classes)

  def forward(self, x):
    return self.head(self.rows(x.long()).mean(1))


class Numbers(nn.Module):
  """A network of integers that are no tokens."""

  def __init__(self, length=7, classes=5):
    super().__init__()
    self.head = nn.Linear(length, classes)

  def forward(self, numbers):
    return self.head(numbers.float())


class Lstm(nn.Module):
  """Recurrent layers of each kind over sequences of features."""

  def __init__(self, features=6, classes=5):
    super().__init__()
    self.lstm = nn.LSTM(features, 8, 2, batch_first=True, bidirectional=True)
    self.gru = nn.GRU(16, 7, batch_first=True)
    self.rnn = nn.RNN(7, 6, nonlinearity='relu')
    self.head = nn.Linear(6, classes)

  def forward(self, x):
    x, _ = self.lstm(x)
    x, _ = self.gru(x)
    _, x = self.rnn(x.transpose(0, 1))
    return self.head(x[0])


class Flat(nn.Module):
  """Magnitudes, and their sum."""

  def __init__(self):
    super().__init__()
    self.scale = nn.Parameter(torch.ones(2))

  def forward(self, x):
    flat = x.flatten(1)
    sizes = torch.stack([flat.abs().sum(1), torch.linalg.vector_norm(flat, ord=1, dim=1)], 1)
    return sizes * self.scale
