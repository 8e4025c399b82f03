"""Images: ResNet-50, a diffusion U-Net, a vision transformer, a GAN, a detector."""

from __future__ import annotations

import itertools

import torch
import torchvision
from torch import nn

from .common import Block, Run, tokens, train_step, workload


def images(batch: int, side: int, channels: int = 3) -> torch.Tensor:
    """Images on the device, shape (batch, channels, side, side)."""
    return torch.empty(batch, channels, side, side).cuda()


@workload("ResNet-50, batch 64 with a smaller last one, evaluation phases, SGD")
def resnet50(run: Run) -> None:
    """Three epochs of five batches, each followed by evaluation at another batch size."""
    model = torchvision.models.resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in run.steps(3):
        run.step(epoch)
        model.train()
        for batch in (64, 64, 64, 64, 23):
            loss = nn.functional.cross_entropy(
                model(images(batch, 224)), tokens(batch, 1).squeeze(1)
            )
            train_step(model, optimizer, loss)
        model.eval()
        with torch.no_grad():
            for batch in (100, 100, 41):
                model(images(batch, 224)).argmax(-1)


class Down(nn.Module):
    """Two convolutions with a residual path; adds the time's embedding."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1)
        self.time = nn.Linear(256, outside)
        self.norm1 = nn.GroupNorm(8, inside)
        self.norm2 = nn.GroupNorm(8, outside)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """x: (batch, inside, side, side); time: (batch, 256)."""
        y = self.first(nn.functional.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.second(nn.functional.silu(self.norm2(y))) + self.skip(x)


class Unet(nn.Module):
    """Four levels of 64 to 512 channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 256, 512]
        self.enter = nn.Conv2d(4, 64, 3, padding=1)
        self.down = nn.ModuleList(Down(max(64, w // 2), w) for w in widths)
        self.middle = Down(512, 512)
        self.up = nn.ModuleList(Down(2 * w, max(64, w // 2)) for w in reversed(widths))
        self.leave = nn.Conv2d(64, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """x: (batch, 4, side, side), side divisible by 16."""
        x = self.enter(x)
        kept = []
        for level in self.down:
            x = level(x, time)
            kept.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for level in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = level(torch.cat([x, kept.pop()], 1), time)
        return self.leave(x)


@workload("diffusion U-Net, resolutions mixed from step to step, AdamW")
def unet(run: Run) -> None:
    """Buckets of aspect and size, as in training at mixed resolution."""
    model = Unet().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in run.steps(12):
        run.step(number)
        side = run.rng.choice([32, 48, 64, 80, 96])
        batch = max(1, 16384 // (side * side)) * 2
        noisy, time = images(batch, side, 4), torch.empty(batch, 256).cuda()
        loss = nn.functional.mse_loss(model(noisy, time), torch.randn_like(noisy))
        train_step(model, optimizer, loss)


@workload("vision transformer, number of patches varies, mixed precision")
def vit(run: Run) -> None:
    """Images of their native sizes, packed into sequences; autocast to bfloat16."""
    model = nn.Sequential(
        nn.Linear(768, 768), *(Block(768, 12) for _ in range(12)), nn.Linear(768, 1000)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in run.steps(10):
        run.step(number)
        patches = torch.empty(16, run.rng.randint(64, 576), 768).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(patches).mean(1)
            loss = nn.functional.cross_entropy(logits, tokens(16, 1).squeeze(1))
        train_step(model, optimizer, loss)


@workload("GAN, two networks and optimizers in turn")
def gan(run: Run) -> None:
    """A discriminator step on real and generated images, then a generator step; sizes grow."""

    def ladder(widths: list[int], layer: type[nn.Module]) -> nn.Sequential:
        parts: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            parts += [layer(a, b, 4, stride=2, padding=1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
        return nn.Sequential(*parts)

    generator = ladder([256, 512, 256, 128, 3], nn.ConvTranspose2d).cuda()
    critic = ladder([3, 128, 256, 512, 1], nn.Conv2d).cuda()
    adams = [torch.optim.Adam(net.parameters(), lr=2e-4) for net in (generator, critic)]
    for number in run.steps(24):
        run.step(number)
        side = 4 if number < 8 else 6 if number < 16 else 8
        batch = run.rng.choice([32, 48, 64])
        noise = torch.empty(batch, 256, side, side).cuda()
        fake = generator(noise)
        train_step(
            critic, adams[1], critic(fake.detach()).mean() - critic(images(batch, 16 * side)).mean()
        )
        train_step(generator, adams[0], -critic(generator(noise)).mean())


@workload("detector, number of boxes varies from image to image")
def detector(run: Run) -> None:
    """A convolutional trunk, then heads on a number of crops that the host's generator draws."""
    trunk = nn.Sequential(*list(torchvision.models.resnet50().children())[:-2]).cuda()
    boxes = nn.Sequential(nn.Linear(2048 * 9, 1024), nn.ReLU(), nn.Linear(1024, 91 * 5)).cuda()
    masks = nn.Sequential(
        nn.Conv2d(2048, 256, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(256, 91, 2, 2)
    ).cuda()
    parts = nn.ModuleList([trunk, boxes, masks])
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.01, momentum=0.9)
    for number in run.steps(10):
        run.step(number)
        height, width = run.rng.choice([(480, 640), (640, 480), (512, 512), (800, 608)])
        features = trunk(torch.empty(2, 3, height, width).cuda())
        losses = []
        for image in range(2):
            n = run.rng.randint(4, 160)
            index = torch.zeros(n, dtype=torch.long).cuda()
            crops = features[image : image + 1, :, :3, :3][index]
            losses.append(boxes(crops.flatten(1)).square().mean())
            losses.append(masks(crops[: max(1, n // 4)]).square().mean())
        train_step(parts, optimizer, torch.stack(losses).sum())
